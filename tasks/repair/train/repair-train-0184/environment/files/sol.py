def fego(ik, lij):
    ked = ik > lij
    return ked

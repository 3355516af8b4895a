def neti(nov, mik):
    return nov != mik

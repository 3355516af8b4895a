def dose(nov, en):
    return nov - en

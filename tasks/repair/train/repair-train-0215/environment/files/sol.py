def dehi(nu):
    sa = nu[0]
    return sa

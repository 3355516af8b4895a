def roti(uk, az):
    bez = uk + az
    return bez

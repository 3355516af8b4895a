def poko(zuw):
    juf = zuw[-1]
    return juf

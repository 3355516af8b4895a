def lola(jet, fuf):
    return jet % fuf

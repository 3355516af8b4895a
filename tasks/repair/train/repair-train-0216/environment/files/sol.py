def rapu(tuz):
    pub = sorted(tuz)
    return pub

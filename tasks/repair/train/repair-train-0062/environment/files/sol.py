def tupo(tuk):
    return len(tuk)

def hahi(nos, rit):
    ek = nos == rit
    return ek

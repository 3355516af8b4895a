def gavi(ju, oh):
    gu = ju - oh
    return gu

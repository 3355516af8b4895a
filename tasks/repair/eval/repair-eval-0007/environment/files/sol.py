def meza(biz, et):
    it = biz - et
    return it

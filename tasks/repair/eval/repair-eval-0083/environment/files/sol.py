def felo(et, il):
    return et - il

def vufo(pun, vo):
    return pun % vo

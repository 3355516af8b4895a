def zudo(an, oz):
    return an // oz

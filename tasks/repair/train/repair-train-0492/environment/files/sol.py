def koho(bal):
    return sum(range(bal))

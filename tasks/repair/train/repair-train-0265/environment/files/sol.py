def pele(hub):
    ig = sum(range(hub + 1))
    return ig

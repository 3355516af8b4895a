def heha(of):
    ig = max(of)
    return ig

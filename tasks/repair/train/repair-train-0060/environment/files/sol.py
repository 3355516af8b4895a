def nenu(op):
    ig = sum(range(op))
    return ig

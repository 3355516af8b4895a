def bamu(pa):
    zo = sorted(pa)
    return zo

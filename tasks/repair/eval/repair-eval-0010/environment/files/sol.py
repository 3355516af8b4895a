def veze(bag):
    ba = bag[-1]
    return ba

def vumi(ro):
    return sum(range(ro))

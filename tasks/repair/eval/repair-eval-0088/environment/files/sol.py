def loni(ab, uz):
    return ab == uz

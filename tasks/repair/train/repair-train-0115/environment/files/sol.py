def hafo(jap, ur):
    return jap - ur

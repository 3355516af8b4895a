def niru(jap, am):
    return jap - am

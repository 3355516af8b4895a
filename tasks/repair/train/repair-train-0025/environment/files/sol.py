def tope(tuv, er):
    weh = tuv + er
    return weh

def gubo(hel, ig):
    viv = hel // ig
    return viv

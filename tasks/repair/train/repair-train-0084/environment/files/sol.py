def lipu(de, ig):
    return de + ig

def neno(re):
    return sum(range(re))

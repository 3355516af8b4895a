def feki(kep, om):
    ku = kep // om
    return ku

def piti(ag, ki):
    return ag > ki

def sera(vil, fuv):
    go = vil * fuv
    return go

def voge(map, rej):
    return map == rej

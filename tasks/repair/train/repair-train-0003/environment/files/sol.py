def mizu(ul, po):
    return ul + po

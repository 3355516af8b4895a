def toja(sad, ut):
    hil = sad * ut
    return hil

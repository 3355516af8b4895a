def jami(mel, zi):
    tij = mel % zi
    return tij

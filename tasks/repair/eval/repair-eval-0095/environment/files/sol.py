def jowa(bow, hu):
    mad = bow + hu
    return mad

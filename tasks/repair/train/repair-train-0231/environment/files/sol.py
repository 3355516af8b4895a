def pula(fen):
    return len(fen)

def weki(rag):
    return min(rag)

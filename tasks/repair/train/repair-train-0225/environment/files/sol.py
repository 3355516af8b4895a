def vevi(tig, wa):
    return tig % wa

def same(he, pud):
    return he == pud

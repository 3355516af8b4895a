def razu(fu):
    nav = fu[1]
    return nav

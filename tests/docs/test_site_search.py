"""The search of the documentation site finds the page of a question, in a browser."""

from doubles import file_server, running

QUESTIONS = {
    "near duplicate": "tasks/duplicates",
    "number of clusters": "tasks/cluster",
    "unknown": "tasks/unknown-inputs",
    "reproduce table": "methods/index",
    "agent memory": "tasks/relevant",
    "voice": "tasks/who",
    "threshold": "tasks/match",
    "search my photos": "tasks/own-images",
    "which loss": "losses",
    "choose a head": "which-head",
    "calibration": "tasks/classify",
    "sentence embeddings": "tasks/text-embeddings",
    "wrong labels": "tasks/duplicates",
    "larger than memory": "tasks/beyond-memory",
    "million classes": "scaling",
    "without internet": "weights",
    "significance": "compare",
    "interactive sphere": "notebooks/gallery",
    "not ours": "tasks/unknown-inputs",
}


def test_the_page_of_a_question_is_among_the_first_three_results_and_most_often_the_first(site, chromium):
    found = {}
    with running(file_server(site)) as address:
        page = chromium.new_page(viewport={"width": 1280, "height": 800})
        page.goto(f"{address}/index.html")
        box, results = page.locator(".md-search__input"), page.locator(".md-search-result__item")
        box.click()
        for question in QUESTIONS:
            for text, state in (("", "detached"), (question, "attached")):
                box.fill(text)
                box.press("End")  # the page listens to keys
                results.first.wait_for(state=state)
            links = results.locator("> a").evaluate_all("links => links.map(link => link.pathname)")
            found[question] = [*dict.fromkeys(link.strip("/").removesuffix(".html") for link in links)]
        page.close()
    assert {question: pages for question, pages in found.items() if QUESTIONS[question] not in pages[:3]} == {}
    later = {question: pages[0] for question, pages in found.items() if QUESTIONS[question] != pages[0]}
    assert len(later) <= len(QUESTIONS) // 5, later

"use strict";
(() => {
  const AT_ONCE = 50; // rows that are added to the table at a time
  const sets = JSON.parse(document.getElementById("page-data").textContent);

  /** Make an element. Texts become text nodes, so nothing in them is read as HTML. */
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child !== null));
    return element;
  };
  const number = (value) => value.toFixed(4);
  const signed = (value) => (value > 0 ? "+" : "") + value.toFixed(4);
  const style = (value) => (value > 1e-9 ? "gain" : value < -1e-9 ? "loss" : "same");

  /** A regular expression of the words to mark, or null. Words of scripts without spaces are found inside of others. */
  const pattern = (terms) => {
    const unspaced = /[\p{scx=Han}\p{scx=Hiragana}\p{scx=Katakana}\p{scx=Hangul}\p{scx=Thai}\p{scx=Lao}\p{scx=Khmer}\p{scx=Myanmar}]/u;
    const escape = (word) => word.replace(/[.*+?^${}()|[\]\\\/-]/g, "\\$&");
    const parts = terms.filter((word) => unspaced.test(word)).map(escape);
    const words = terms.filter((word) => !unspaced.test(word)).map(escape);
    const edge = "[\\p{L}\\p{M}\\p{N}_]";
    if (words.length) parts.push(`(?<!${edge})(?:${words.join("|")})(?!${edge})`);
    return parts.length ? new RegExp(parts.join("|"), "giu") : null;
  };
  const marked = (text, words) => {
    if (!words) return [text];
    const parts = [];
    let end = 0;
    for (const match of text.matchAll(words)) {
      if (match.index > end) parts.push(text.slice(end, match.index));
      parts.push(make("mark", {}, match[0]));
      end = match.index + match[0].length;
    }
    parts.push(text.slice(end));
    return parts;
  };

  const table = (set, container, index) => {
    const two = set.runs.length === 2;
    const several = set.runs.length > 2;
    const state = { measure: 0, sort: set.runs.length > 1 ? "difference" : "0", down: true, words: [], show: "all", count: AT_ONCE };
    const value = (row, run) => row[2][run][state.measure];
    const difference = (row) => {
      const values = row[2].map((measures) => measures[state.measure]);
      return several ? Math.max(...values) - Math.min(...values) : values[values.length - 1] - values[0];
    };
    const haystack = set.rows.map((row) => `${row[0]} ${row[1]}`.toLowerCase());
    const body = make("tbody");
    const status = make("p", { class: "count", role: "status" });
    const more = make("button", { class: "more", type: "button", onclick: () => { const first = state.count; state.count += AT_ONCE; draw(); body.querySelectorAll("tr.row")[first]?.querySelector("button")?.focus(); } });
    const open = new Set();

    const headings = [["id", "Query"], ...set.runs.map((name, run) => [String(run), name])];
    if (set.runs.length > 1) headings.push(["difference", several ? "Largest difference" : "Difference"]);
    const head = make("tr", {}, ...headings.map(([key, label]) => make("th", { scope: "col", "data-key": key },
      make("button", { type: "button", onclick: () => { state.down = state.sort === key ? !state.down : key !== "id"; state.sort = key; state.count = AT_ONCE; draw(); } },
        label, " ", make("span", { class: "arrow", "aria-hidden": "true" })))));

    const bar = (amount, bound) => {
      const width = bound ? (Math.abs(amount) / bound) * (several ? 100 : 50) : 0;
      const inner = make("i", { class: several ? "spread" : style(amount) });
      inner.style.width = `${width}%`;
      return make("span", { class: "bar", "aria-hidden": "true" }, inner);
    };

    const draw = () => {
      const chosen = [];
      set.rows.forEach((row, i) => {
        if (!state.words.every((word) => haystack[i].includes(word))) return;
        if (state.show !== "all" && style(difference(row)) !== state.show) return;
        chosen.push(i);
      });
      const ids = new Intl.Collator("en", { numeric: true });
      const key = (i) => (state.sort === "difference" ? difference(set.rows[i]) : value(set.rows[i], Number(state.sort)));
      const byId = (a, b) => ids.compare(set.rows[a][0], set.rows[b][0]);
      chosen.sort((a, b) => (state.sort === "id" ? byId(a, b) : key(a) - key(b)) * (state.down ? -1 : 1) || byId(a, b));
      const bound = set.rows.reduce((most, row) => Math.max(most, Math.abs(difference(row))), 0);
      for (const cell of head.children) {
        const active = cell.dataset.key === state.sort;
        if (active) cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
        else cell.removeAttribute("aria-sort");
        cell.querySelector(".arrow").textContent = active ? (state.down ? "\u2193" : "\u2191") : "";
      }
      body.replaceChildren(...chosen.slice(0, state.count).flatMap((i) => rows(i, bound)));
      status.textContent = `${chosen.length} of ${set.rows.length} queries`;
      const left = chosen.length - state.count;
      more.hidden = left <= 0;
      more.textContent = `Show ${Math.min(left, AT_ONCE)} more of ${left}`;
    };

    const rows = (i, bound) => {
      const row = set.rows[i];
      const id = `set-${index}-query-${i}`;
      const name = [make("span", { class: "words" }, row[1] || row[0]), row[1] ? make("span", { class: "id" }, row[0]) : null];
      const first = make("th", { class: "query", scope: "row", role: "rowheader" });
      const line = make("tr", { class: "row", role: "row" }, first,
        ...set.runs.map((label, run) => make("td", { class: "number", role: "cell", "data-label": label }, number(value(row, run)))));
      if (set.runs.length > 1) {
        const amount = difference(row);
        line.append(make("td", { class: "number", role: "cell", "data-label": headings[headings.length - 1][1] },
          make("span", { class: several ? "same" : style(amount) }, several ? number(amount) : signed(amount)), bar(amount, bound)));
      }
      if (i >= set.details.length) {
        first.append(make("span", { class: "static" }, ...name.filter(Boolean)));
        return [line];
      }
      const below = () => make("tr", { class: "open-detail", id, role: "row" },
        make("td", { class: "detail", role: "cell", colspan: headings.length }, ...detail(set, i)));
      const button = make("button", { type: "button", "aria-expanded": String(open.has(i)), "aria-controls": id, onclick: () => {
        if (open.delete(i)) line.nextSibling.remove();
        else { open.add(i); line.after(below()); }
        button.setAttribute("aria-expanded", String(open.has(i)));
      } }, make("span", { class: "turn", "aria-hidden": "true" }), ...name.filter(Boolean));
      first.append(button);
      return open.has(i) ? [line, below()] : [line];
    };

    const search = make("input", { type: "search", placeholder: "Words or an id", oninput: (event) => { state.words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean); state.count = AT_ONCE; draw(); } });
    const measures = make("select", { onchange: (event) => { state.measure = Number(event.target.value); draw(); } },
      ...set.measures.map((name, i) => make("option", { value: i }, name)));
    const show = make("select", { onchange: (event) => { state.show = event.target.value; state.count = AT_ONCE; draw(); } },
      ...[["all", "all"], ["gain", "better"], ["loss", "worse"], ["same", "the same"]].map(([key, label]) => make("option", { value: key }, label)));
    container.replaceChildren(
      make("div", { class: "controls" },
        make("label", { class: "search" }, "Search queries", search),
        make("label", {}, "Measure", measures),
        two ? make("label", {}, "Show", show) : ""),
      status,
      make("div", { class: "list" },
        make("table", { role: "table", "aria-labelledby": `set-${index}-queries` }, make("thead", { role: "rowgroup" }, head), body), more));
    body.setAttribute("role", "rowgroup");
    draw();
  };

  /** The documents of one query, run by run. */
  const detail = (set, i) => {
    const row = set.rows[i];
    const { docs, terms = [] } = set.details[i];
    const words = pattern(terms);
    const two = set.runs.length === 2;
    const values = make("table", {},
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "measure"), ...set.runs.map((name) => make("th", { scope: "col" }, name)))),
      make("tbody", {}, ...set.measures.map((name, m) => make("tr", {}, make("th", { scope: "row" }, name),
        ...row[2].map((measures) => make("td", {}, number(measures[m])))))));
    const grade = (value) => (value === null ? "not judged" : value >= set.relevance ? `relevant, grade ${value}` : `judged ${value}`);
    const moved = (ranks, run) => {
      if (set.runs.length === 1 || (run === 0 && !two)) return null;
      const other = run === 0 ? ranks[1] : ranks[0];
      const where = run === 0 ? "to" : "from";
      if (other === null) return make("span", {}, `not in ${set.runs[run === 0 ? 1 : 0]}`);
      const up = run === 0 ? ranks[0] - other : other - ranks[run];
      if (up === 0) return make("span", {}, "same rank");
      return make("span", { class: up > 0 ? "gain" : "loss" }, make("span", { "aria-hidden": "true" }, up > 0 ? "\u25b2 " : "\u25bc "), `${up > 0 ? "up" : "down"} ${where} ${other}`);
    };
    const item = (doc, run) => {
      const [place, judged, ranks, scores] = doc;
      const [id, title = "", text = ""] = set.docs[place];
      const relevant = judged !== null && judged >= set.relevance;
      return make("li", { class: relevant ? "doc relevant" : "doc", "data-doc": place },
        make("div", { class: "head" },
          make("span", { class: "rank" }, make("span", { class: "hidden" }, "rank "), String(ranks[run])), moved(ranks, run),
          make("span", { class: "badge" }, grade(judged)), make("span", { class: "docid" }, id),
          make("span", { class: "score" }, make("span", { class: "hidden" }, "score "), String(scores[run]))),
        title ? make("h5", {}, ...marked(title, words)) : null,
        text ? make("p", {}, ...marked(text, words)) : null);
    };
    const columns = set.runs.map((name, run) => {
      const ranked = docs.filter((doc) => doc[2][run] !== null && doc[2][run] <= set.depth).sort((a, b) => a[2][run] - b[2][run]);
      return make("div", {}, make("h4", {}, name),
        ranked.length ? make("ol", { class: "docs" }, ...ranked.map((doc) => item(doc, run))) : make("p", { class: "note" }, "No documents."));
    });
    const grid = make("div", { class: "runs" }, ...columns);
    const point = (event) => {
      const place = event.type === "mouseover" ? event.target.closest(".doc")?.dataset.doc : undefined;
      for (const doc of grid.querySelectorAll(".doc")) doc.classList.toggle("other", doc.dataset.doc === place);
    };
    grid.addEventListener("mouseover", point);
    grid.addEventListener("mouseleave", point);
    const full = make("button", { type: "button", "aria-pressed": "false", onclick: () => {
      full.setAttribute("aria-pressed", String(grid.classList.toggle("full")));
    } }, "Longer texts");
    const missed = docs.filter((doc) => doc[2].every((rank) => rank === null || rank > set.depth));
    const parts = [make("div", { class: "scroll" }, values)];
    if (set.docs.some((doc) => doc.length > 1)) {
      parts.push(make("div", { class: "tools" }, full, terms.length ? make("span", {}, make("mark", {}, "marked"), " words match the query") : null));
    }
    parts.push(grid);
    if (missed.length) {
      parts.push(make("div", { class: "below" }, make("h4", {}, `Relevant documents below rank ${set.depth}`),
        make("ul", { class: "docs" }, ...missed.map(([place, judged, ranks]) => {
          const [id, title = "", text = ""] = set.docs[place];
          const where = ranks.map((rank, run) => `${set.runs[run]}: ${rank === null ? "not ranked" : rank}`).join(", ");
          return make("li", { class: "doc relevant" },
            make("div", { class: "head" }, make("span", { class: "badge" }, grade(judged)), make("span", { class: "docid" }, id), make("span", {}, where)),
            title ? make("h5", {}, ...marked(title, words)) : null,
            text ? make("p", {}, ...marked(text, words)) : null);
        }))));
    }
    return parts;
  };

  for (const container of document.querySelectorAll(".queries")) {
    const index = Number(container.dataset.set);
    table(sets[index], container, index);
  }
})();

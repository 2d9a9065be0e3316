"use strict";
/* What is chosen, what follows from it (`shown`), and how that is drawn. */
const explorer = (function () {
  const F = formulas, SAMPLES = 160, CELLS = 48, MOST = 64;
  const $ = (id) => document.getElementById(id);
  const said = (n) => n === Infinity ? "any length" : Math.round(n).toLocaleString("en-US");
  const short = (x) => x === 0 ? "0" : Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3 ? x.toExponential(2) : String(+x.toPrecision(4));
  const state = { scheme: data.first, times: 4, options: {}, temperature: "", pair: 0 };

  function chosen(scheme) {
    const made = {};
    scheme.controls.forEach((c) => { made[c.name] = c.name in state.options ? state.options[c.name] : c.choices.length && c.default === null ? c.choices[0] : c.default; });
    return made;
  }
  const spread = (last, n) => [...new Set(F.range(n, (i) => Math.round((last * i) / (n - 1))))];

  /* Everything that the page shows, as numbers. */
  function shown() {
    const scheme = data.schemes[state.scheme];
    if (scheme.refused) return { refused: scheme.refused };
    const g = scheme.geometry, trained = g.trained_length, target = Math.round(trained * state.times);
    const reach = { trained, target, factor: target / trained }, o = chosen(scheme);
    const found = { scheme: state.scheme, trained, target, factor: reach.factor, derived: {}, grade: scheme.grade, trains: scheme.trains };
    try {
      const before = scheme.inv_freq;
      let at = () => before, scaling = scheme.scaling, config = null, pattern = null;
      const rotates = state.scheme in F.rotary;
      if (rotates) {
        const r = F.rotary[state.scheme](scheme, g, o, reach);
        at = r.following ? (n) => F.following(r.following, n) : () => r.f;
        scaling = r.scaling;
        config = data.family_rope ? r.config : null;
        found.grade = config ? "config" : "sealed";
      }
      if (state.scheme in F.patterns) {
        pattern = F.patterns[state.scheme](g, o, reach);
        found.derived = pattern.derived;
      }
      const limit = trained * 1024;
      found.reach = pattern ? pattern.reach : rotates ? F.angleReach(before, at, trained, limit)
        : state.scheme in F.biases || state.scheme === "none" ? Infinity : state.scheme === "learned" ? target : trained;
      if (found.reach >= limit) found.reach = Infinity;
      found.config = config;
      if (rotates) {
        const after = at(target), seen = F.turns(before, trained), asked = F.turns(after, target);
        found.rotation = { before, after, scaling, seen, asked, beyond: F.beyond(seen, asked) };
        const x = spread(target - 1, SAMPLES);
        found.score = { x, curves: [["before", x.map((d) => F.score(before, d))], [state.scheme, x.map((d) => F.score(after, d))]], label: "mean of cos(distance × frequency)" };
      }
      if (state.scheme in F.biases) {
        const x = spread(target - 1, SAMPLES), made = x.map((d) => F.biases[state.scheme](scheme, g, o, d, target - 1));
        const heads = F.range(Math.min(4, g.num_heads), (i) => Math.floor((i * g.num_heads) / Math.min(4, g.num_heads)));
        found.score = { x, curves: heads.map((h) => [`head ${h}`, made.map((row) => row[h])]), label: "added to the score" };
      }
      if (pattern || state.scheme === "none") {
        const told = pattern ? pattern.told : (q, k) => (k <= q || !g.causal ? q - k : null);
        const places = F.range(CELLS, (i) => Math.floor(((i + 0.5) * target) / CELLS));
        found.keys = { at: places, cells: places.map((q) => places.map((k) => told(q, k))) };
        if (pattern) {
          const x = spread(target - 1, SAMPLES), last = x.map((d) => told(target - 1, target - 1 - d));
          found.told = { x, y: last };
        }
      }
      if (state.scheme in F.tables) {
        const channels = Math.min(64, g.hidden_size);
        found.table = F.range(64, (p) => F.range(channels, (c) => F.tables[state.scheme](scheme, g, o, p, c)));
      }
      if (state.scheme === "learned") {
        const x = spread(target - 1, SAMPLES);
        found.rows = { x, y: x.map((p) => F.rows[o.resize](p, trained, target, o.alpha)) };
      }
      const temperature = F.temperatures[state.temperature];
      if (temperature) {
        const x = spread(target, SAMPLES).map((n) => Math.max(n, 1));
        found.temperature = { x, y: x.map((n) => temperature(n, trained, reach.factor, scheme.original)) };
        found.config = null;
        found.grade = "sealed";
      }
      found.options = { ...state.options };
    } catch (error) {
      if (!(error instanceof F.Refused)) throw error;
      return { refused: error.message, scheme: state.scheme, trained, target };
    }
    return found;
  }

  /* ---- words ---- */
  function sentences(s) {
    const made = [], r = s.rotation;
    if (r) {
      const still = r.after.filter((f) => f === 0).length, n = r.before.length;
      made.push(r.beyond ? `<b>${r.beyond} of ${n} pairs</b> reach angles at ${said(s.target)} tokens that training at ${said(s.trained)} never did.`
        : `<b>None of ${n} pairs</b> leaves the angles that training at ${said(s.trained)} tokens has seen.`);
      if (still) made.push(`${still} pairs do not rotate at all.`);
      if (r.scaling !== 1) made.push(`Cosines and sines are multiplied by ${r.scaling.toFixed(4)}: attention is sharper by the square of it.`);
    }
    made.push(s.reach === Infinity ? "<b>Predicted reach: no limit</b> by positions alone; what a model does with so much text is another matter."
      : `<b>Predicted reach: ${said(s.reach)} tokens</b>${s.reach < s.target ? ", short of the target" : ""}, by positions alone.`);
    if (["streaming", "lm_infinite", "window"].includes(s.scheme)) made.push("What has left the window cannot be found again.");
    made.push(s.trains ? "<b>Needs training:</b> this model's weights have never seen such positions." : "Works on this model without training.");
    made.push(`Saved as <i>${s.grade}</i>: ${data.meaning[s.grade]}.`);
    return made;
  }
  function copies(s) {
    const given = Object.entries(s.options), q = (v) => typeof v === "string" ? JSON.stringify(v) : v === true ? "True" : v === false ? "False" : v;
    const more = given.map(([k, v]) => `, ${k}=${q(v)}`).join("") + (state.temperature ? `, temperature="${state.temperature}"` : "");
    const flags = given.map(([k, v]) => ` --option ${k}=${v}`).join("") + (state.temperature ? ` --temperature ${state.temperature}` : "");
    const out = data.path.replace(/\/+$/, "").split("/").pop() + "-long";
    return {
      command: `hf-posenc patch ${data.path} ${out} --scheme ${s.scheme} --target-length ${s.target}${flags}`,
      python: `patch_model(model, "${s.scheme}", target_length=${s.target}${more})`,
      config: s.config ? JSON.stringify({ max_position_embeddings: s.target, rope_parameters: s.config }, null, 1) : "",
    };
  }

  /* ---- pictures ---- */
  const W = 460, H = 250, box = { l: 54, r: 446, t: 14, b: 212 };
  const esc = (t) => String(t).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
  const text = (x, y, t, cls = "tick", anchor = "start") => `<text x="${x.toFixed(1)}" y="${y.toFixed(1)}" class="${cls}" text-anchor="${anchor}">${esc(t)}</text>`;
  const line = (x1, y1, x2, y2, cls) => `<line x1="${x1.toFixed(1)}" y1="${y1.toFixed(1)}" x2="${x2.toFixed(1)}" y2="${y2.toFixed(1)}" class="${cls}"/>`;
  function steps(low, high) {
    const rough = (high - low || 1) / 4, power = Math.pow(10, Math.floor(Math.log10(rough)));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((m) => m >= rough * 0.999), first = Math.floor(low / step + 1e-9);
    return F.range(Math.max(1, Math.ceil(high / step - 1e-9) - first) + 1, (i) => (first + i) * step);
  }
  function chart(title, x, curves, opt) {
    const values = curves.flatMap((c) => c[1]).filter((v) => v !== null && isFinite(v)).concat(Object.values(opt.edges || {}));
    let marks, up;
    if (opt.log) {
      const low = Math.floor(Math.log10(Math.min(...values))), high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...values))));
      const every = Math.ceil((high - low) / 5);
      marks = F.range(Math.floor((high - low) / every) + 1, (i) => Math.pow(10, low + i * every));
      up = (v) => box.b - ((Math.log10(v) - low) / (high - low)) * (box.b - box.t);
    } else {
      marks = steps(opt.low ?? Math.min(...values), opt.high ?? Math.max(...values));
      const low = marks[0], high = marks[marks.length - 1];
      up = (v) => box.b - ((v - low) / (high - low || 1)) * (box.b - box.t);
    }
    const last = x[x.length - 1] || 1, along = (v) => box.l + (v / last) * (box.r - box.l);
    let body = marks.map((m) => line(box.l, up(m), box.r, up(m), "grid") + text(box.l - 6, up(m) + 4, short(m), "tick", "end")).join("");
    body += [0, 0.5, 1].map((p) => text(along(last * p), box.b + 17, said(last * p), "tick", p === 1 ? "end" : p ? "middle" : "start")).join("");
    body += text((box.l + box.r) / 2, H - 3, opt.x, "tick", "middle");
    Object.entries(opt.edges || {}).forEach(([name, v]) => { body += line(box.l, up(v), box.r, up(v), "edge") + text(box.l + 6, up(v) - 4, name, "edge-name"); });
    curves.forEach(([, ys], i) => {
      let path = "", pen = "M";
      ys.forEach((v, j) => { if (v === null || !isFinite(v)) { pen = "M"; return; } path += `${pen}${along(x[j]).toFixed(1)} ${up(v).toFixed(1)}`; pen = "L"; });
      body += `<path class="curve s${curves.length > 1 ? i : 1}" d="${path}"/>`;
    });
    const legend = curves.length > 1 ? `<ul class="legend">${curves.map(([n], i) => `<li class="s${i}"><i></i>${esc(n)}</li>`).join("")}</ul>` : "";
    return legend + `<svg viewBox="0 0 ${W} ${H}" role="img" aria-label="${esc(title)}">${body}</svg>`;
  }
  function heat(id, cells, colour) {
    const canvas = $(id).querySelector("canvas"), n = cells[0].length;
    canvas.width = n; canvas.height = cells.length;
    const pen = canvas.getContext("2d"), css = getComputedStyle(document.documentElement);
    const plus = css.getPropertyValue("--s1").trim(), minus = css.getPropertyValue("--s2").trim(), ground = css.getPropertyValue("--faint").trim();
    pen.fillStyle = ground; pen.fillRect(0, 0, n, cells.length);
    cells.forEach((row, y) => row.forEach((v, x) => {
      const strength = colour(v);
      if (!strength) return;
      pen.globalAlpha = Math.min(1, Math.abs(strength)); pen.fillStyle = strength > 0 ? plus : minus; pen.fillRect(x, y, 1, 1);
    }));
    pen.globalAlpha = 1;
  }
  function dial(s) {
    const i = Math.min(state.pair, s.rotation.before.length - 1), R = 88, cx = [120, 340];
    const arc = (x, r, turn, cls) => {
      if (turn >= 0.9999) return `<circle cx="${x}" cy="112" r="${r}" class="${cls}"/>`;
      const a = turn * F.TURN;
      return `<path class="${cls}" d="M${x + r} 112A${r} ${r} 0 ${turn > 0.5 ? 1 : 0} 0 ${(x + r * Math.cos(a)).toFixed(1)} ${(112 - r * Math.sin(a)).toFixed(1)}"/>`;
    };
    const one = (x, f, name) => {
      const seen = s.rotation.seen[i], asked = Math.min(1, (s.target * f) / F.TURN), out = asked > seen * 1.001;
      let body = `<circle cx="${x}" cy="112" r="${R}" class="ring"/>` + arc(x, R, seen, "seen") + arc(x, R - 12, asked, out ? "asked out" : "asked");
      F.range(8, (p) => { const a = p * f; body += `<circle class="dot" r="3.2" cx="${(x + (R - 28) * Math.cos(a)).toFixed(1)}" cy="${(112 - (R - 28) * Math.sin(a)).toFixed(1)}"/>`; });
      return body + text(x, 108, f === 0 ? "still" : `${said(Math.max(1, F.TURN / f))}`, "big", "middle") + text(x, 126, f === 0 ? "" : "tokens a turn", "tick", "middle") + text(x, 226, name, "tick", "middle");
    };
    return `<svg viewBox="0 0 ${W} 236" role="img" aria-label="Rotation of pair ${i}">${one(cx[0], s.rotation.before[i], "before")}${one(cx[1], s.rotation.after[i], s.scheme)}</svg>`;
  }
  function put(id, made) { const f = $(id); f.hidden = !made; if (made && typeof made === "string") f.querySelector(".plot").innerHTML = made; }
  function table(s) {
    if (!s.rotation) return "";
    const r = s.rotation, cell = (v) => `<td>${v.toPrecision(8)}</td>`;
    return `<table><thead><tr><th>pair</th><th>frequency before</th><th>after</th><th>turns seen</th><th>turns asked</th></tr></thead><tbody>`
      + r.before.map((f, i) => `<tr><th>${i}</th>${cell(f)}${cell(r.after[i])}${cell(r.seen[i])}${cell(r.asked[i])}</tr>`).join("") + "</tbody></table>";
  }

  function draw() {
    const s = shown();
    explorer.last = s;
    $("refused").hidden = !s.refused;
    $("answer").hidden = $("pictures").hidden = !!s.refused;
    $("target").textContent = s.target ? `${said(s.trained)} → ${said(s.target)} tokens` : "";
    if (s.refused) { $("refused").textContent = s.refused; return; }
    $("words").innerHTML = sentences(s).map((t) => `<li>${t}</li>`).join("");
    const c = copies(s);
    $("command").textContent = c.command; $("python").textContent = c.python; $("config").textContent = c.config;
    $("config-box").hidden = !c.config;
    const pairs = s.rotation && s.rotation.before.map((_, i) => i), edges = { [`trained ${said(s.trained)}`]: s.trained, ...(s.target > s.trained ? { [`target ${said(s.target)}`]: s.target } : {}) };
    const waves = (f) => f.map((x) => (x > 0 ? F.TURN / x : null));
    put("waves", s.rotation && chart("Wavelengths", pairs, [["before", waves(s.rotation.before)], [s.scheme, waves(s.rotation.after)]], { log: true, x: "pair, fast to slow", edges }));
    put("turns", s.rotation && chart("Turns", pairs, [["seen in training", s.rotation.seen], [`asked at ${said(s.target)}`, s.rotation.asked]], { low: 0, high: 1, x: "pair, fast to slow" }));
    put("rotation", s.rotation && dial(s));
    put("score", s.score && chart("Score against distance", s.score.x, s.score.curves, { x: `distance, tokens (${s.score.label})` }));
    put("told", s.told && chart("Distance told", s.told.x, [["true distance", s.told.x], ["what RoPE is told", s.told.y]], { low: 0, x: "true distance of a key, tokens", edges: { [`trained ${said(s.trained)}`]: s.trained } }));
    put("rows", s.rows && chart("Rows read", s.rows.x, [["row", s.rows.y]], { low: 0, x: "position" }));
    put("heat", s.temperature && chart("Temperature", s.temperature.x, [["factor", s.temperature.y]], { x: "tokens that a query sees" }));
    put("keys", !!s.keys); put("table", !!s.table);
    if (s.keys) heat("keys", s.keys.cells, (v) => (v === null ? 0 : 0.25 + 0.75 * Math.min(1, Math.abs(v) / s.target)));
    if (s.table) heat("table", s.table, (v) => v);
    $("numbers").hidden = !s.rotation; $("numbers").querySelector("div").innerHTML = table(s);
    data.schemes[state.scheme].controls.forEach((c) => {
      const out = $(`out-${c.name}`);
      if (out) out.textContent = c.name in state.options ? short(+state.options[c.name]) === "NaN" ? state.options[c.name] : short(+state.options[c.name]) : c.name in s.derived ? `${short(s.derived[c.name])} (default)` : c.default === null ? "default" : `${c.default} (default)`;
    });
    history.replaceState(null, "", "#" + encodeURIComponent(JSON.stringify(state)));
  }

  /* ---- controls ---- */
  const toValue = (c, p) => { const v = c.log ? c.low * Math.pow(c.high / c.low, p / 1000) : c.low + ((c.high - c.low) * p) / 1000; return c.whole ? Math.round(v) : +v.toPrecision(4); };
  const toSlider = (c, v) => (c.high === c.low ? 0 : 1000 * (c.log ? Math.log(v / c.low) / Math.log(c.high / c.low) : (v - c.low) / (c.high - c.low)));
  function control(c) {
    const row = document.createElement("div"), now = state.options[c.name] ?? c.default, id = `c-${c.name}`;
    row.className = "control";
    if (c.switch) row.innerHTML = `<label for="${id}">${c.name}</label><input type="checkbox" id="${id}"${now ? " checked" : ""}>`;
    else if (c.choices.length) row.innerHTML = `<label for="${id}">${c.name}</label><select id="${id}">${c.choices.map((v) => `<option${v === now ? " selected" : ""}>${v}</option>`).join("")}</select>`;
    else row.innerHTML = `<label for="${id}">${c.name}</label><output id="out-${c.name}" for="${id}"></output><input type="range" id="${id}" min="0" max="1000" step="1" value="${typeof now === "number" ? toSlider(c, now) : 500}">`
      + (c.word ? `<label class="word"><input type="checkbox" id="${id}-word"${now === c.word ? " checked" : ""}> ${c.word}</label>` : "");
    row.addEventListener("input", (event) => {
      const t = event.target;
      if (t.id === `${id}-word`) { if (t.checked) state.options[c.name] = c.word; else delete state.options[c.name]; }
      else { state.options[c.name] = c.switch ? t.checked : c.choices.length ? t.value : toValue(c, +t.value); if (c.word) $(`${id}-word`).checked = false; }
      draw();
    });
    return row;
  }
  function controls() {
    $("options").replaceChildren(...data.schemes[state.scheme].controls.map(control));
    $("summary").textContent = data.schemes[state.scheme].summary;
    const n = (data.schemes[state.scheme].inv_freq || []).length;
    state.pair = Math.min(state.pair || Math.floor(n * 0.7), Math.max(0, n - 1));
    $("pair").max = Math.max(0, n - 1); $("pair").value = state.pair; $("pair-out").textContent = state.pair;
  }
  function choose(name, options = {}) { state.scheme = name; state.options = options; $("scheme").value = name; controls(); draw(); }
  function set(change) { Object.assign(state, change); $("scheme").value = state.scheme; $("times").value = 1000 * Math.log(state.times) / Math.log(MOST); $("times-out").textContent = `× ${short(state.times)}`; $("temperature").value = state.temperature; controls(); draw(); return shown(); }

  function begin() {
    $("scheme").innerHTML = Object.entries(data.groups).map(([g, names]) => `<optgroup label="${g}">${names.map((n) => `<option value="${n}">${n}${data.schemes[n].refused ? " (refused here)" : ""}</option>`).join("")}</optgroup>`).join("");
    $("scheme").addEventListener("change", (e) => choose(e.target.value));
    $("times").addEventListener("input", (e) => { state.times = +Math.pow(MOST, e.target.value / 1000).toPrecision(3); $("times-out").textContent = `× ${short(state.times)}`; draw(); });
    $("temperature").addEventListener("change", (e) => { state.temperature = e.target.value; draw(); });
    $("pair").addEventListener("input", (e) => { state.pair = +e.target.value; $("pair-out").textContent = state.pair; draw(); });
    $("reset").addEventListener("click", () => choose(state.scheme));
    document.querySelectorAll("button[data-copy]").forEach((b) => b.addEventListener("click", () => {
      const text = $(b.dataset.copy).textContent, done = () => { b.textContent = "copied"; setTimeout(() => { b.textContent = "copy"; }, 1500); };
      if (navigator.clipboard) navigator.clipboard.writeText(text).then(done, () => select(b.dataset.copy)); else select(b.dataset.copy);
    }));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    let kept = {};
    try { kept = JSON.parse(decodeURIComponent(location.hash.slice(1)) || "{}"); } catch { kept = {}; }
    set(kept && kept.scheme in data.schemes ? kept : {});
  }
  function select(id) { const r = document.createRange(); r.selectNodeContents($(id)); getSelection().removeAllRanges(); getSelection().addRange(r); }
  return { begin, set, shown, state, last: null };
})();
explorer.begin();

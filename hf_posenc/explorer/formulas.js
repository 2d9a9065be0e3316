"use strict";
/* The maths of hf_posenc/schemes and hf_posenc/core, on plain numbers, for a page without Python. Each function has the
   name of the one that it follows; tests/test_explorer.py holds both against each other to 1e-6, in a browser. */
const formulas = (function () {
  const TURN = 2 * Math.PI;
  const INF = Infinity;
  const range = (n, f) => Array.from({ length: n }, (_, i) => f(i));
  const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
  const mod = (a, b) => ((a % b) + b) % b;
  const log1p = Math.log1p, f32 = Math.fround;
  class Refused extends Error {}
  const refuse = (why) => { throw new Refused(why); };

  /* ---- frequencies.py ---- */
  const defaultFrequencies = (dim, theta) => range(dim >> 1, (i) => Math.pow(theta, (-2 * i) / dim));
  const ntkWeights = (n) => range(n, (i) => (n > 1 ? i / (n - 1) : 0));
  const ntkFrequencies = (f, alpha) => f.map((x, i) => x * Math.pow(alpha, -ntkWeights(f.length)[i]));
  function coveringAlpha(f, factor, length) {
    let first = f.findIndex((x) => x * length < TURN);
    if (first < 0) first = f.length - 1;
    return Math.pow(factor, (f.length - 1) / Math.max(first, 1));
  }
  const ntkTheta = (theta, alpha, dim) => theta * Math.pow(alpha, dim / (dim - 2));
  function pairIndex(f, turns, length) {
    const wanted = Math.log((turns * TURN) / length), logs = f.filter((x) => x > 0).map(Math.log);
    if (logs.length < 2) return 0;
    let i = 0;
    while (i < logs.length - 2 && !(logs[i + 1] <= wanted)) i++;
    const slope = logs[i + 1] - logs[i];
    return slope ? i + (wanted - logs[i]) / slope : i;
  }
  function yarnFrequencies(f, factor, length, fast, slow, truncate) {
    let low = pairIndex(f, fast, length), high = pairIndex(f, slow, length);
    if (truncate) { low = Math.floor(low); high = Math.ceil(high); }
    low = Math.max(low, 0); high = Math.min(high, 2 * f.length - 1);
    if (low === high) high += 0.001;
    return f.map((x, i) => { const w = clamp((i - low) / (high - low), 0, 1); return (x / factor) * w + x * (1 - w); });
  }
  const yarnAttentionFactor = (factor) => (factor > 1 ? 0.1 * Math.log(factor) + 1 : 1);
  function llama3Frequencies(f, factor, length, low, high) {
    return f.map((x) => {
      const kept = clamp(((length * x) / TURN - low) / (high - low), 0, 1);
      return ((1 - kept) * x) / factor + kept * x;
    });
  }
  const longropeAttentionFactor = (factor, length) =>
    factor > 1 ? Math.sqrt(1 + Math.log(factor) / Math.log(length)) : 1;
  function proportionalFrequencies(dim, theta, portion) {
    const rotating = Math.trunc(Math.floor((portion * dim) / 2));
    return defaultFrequencies(dim, theta).map((x, i) => (i < rotating ? x : 0));
  }
  function clipped(f, pairs, taper) {
    const first = f.length - pairs;
    const share = (i) => !taper ? 0 : pairs > 1 ? (1 + Math.cos((Math.PI * (i - first)) / (pairs - 1))) / 2 : 1;
    return f.map((x, i) => (i < first ? x : x * share(i)));
  }
  function unfinished(f, length) {
    let whole = 0;
    f.forEach((x, i) => { if (x > 0 && TURN / x <= length) whole = i + 1; });
    return f.length - whole;
  }
  /* effects.FollowingRotation: the frequencies of a query that sees `length` tokens */
  function following(r, length) {
    const over = Math.max(length - r.border, 0);
    const stage = r.step === null ? +(over > 0) : Math.floor((over + r.step - 1) / r.step);
    const growth = r.step === null ? stage : log1p((stage * r.step * r.factor) / r.border);
    return r.f.map((x, i) => x * Math.exp(-growth * r.weights[i]));
  }

  /* ---- rotary schemes: {f | following, scaling, config} ---- */
  function asLongrope(s, f, scaling, factor, trained) {
    const plain = defaultFrequencies(2 * f.length, s.theta), factors = plain.map((x, i) => x / f[i]);
    return {
      rope_type: "longrope", rope_theta: s.theta, short_factor: factors, long_factor: factors, factor: factor,
      attention_factor: scaling, short_mscale: scaling, long_mscale: scaling,
      original_max_position_embeddings: trained,
    };
  }
  function rescaled(s, g, reach, f, attention, written) {
    const scaling = attention * s.scaling;
    const config = s.plain ? { rope_theta: s.theta, ...written }
      : Math.min(...f) > 0 ? asLongrope(s, f, scaling, reach.factor, reach.trained) : null;
    return { f, scaling, config };
  }
  const rotary = {
    rope: (s, g, o) => {
      const theta = o.rope_theta === null ? s.theta : o.rope_theta;
      return { f: defaultFrequencies(g.rotary_dim, theta), scaling: 1, config: { rope_type: "default", rope_theta: theta } };
    },
    linear: (s, g, o, r) =>
      rescaled(s, g, r, s.inv_freq.map((x) => x / r.factor), 1, { rope_type: "linear", factor: r.factor }),
    ntk: (s, g, o, r) => {
      const alphaOf = (f) => o.alpha === null ? r.factor : o.alpha === "cover" ? coveringAlpha(f, r.factor, r.trained) : o.alpha;
      const plain = alphaOf(defaultFrequencies(g.rotary_dim, s.theta));
      const written = { rope_type: "default", rope_theta: ntkTheta(s.theta, plain, g.rotary_dim) };
      return rescaled(s, g, r, ntkFrequencies(s.inv_freq, alphaOf(s.inv_freq)), 1, written);
    },
    yarn: (s, g, o, r) => {
      if (o.beta_fast <= o.beta_slow) refuse("beta_fast must be greater than beta_slow.");
      const attention = o.attention_factor === null ? yarnAttentionFactor(r.factor) : o.attention_factor;
      const usual = yarnAttentionFactor(r.factor);
      const told = attention !== usual && usual !== 1 ? { mscale: (attention - 1) / (usual - 1), mscale_all_dim: 0 } : {};
      const f = yarnFrequencies(s.inv_freq, r.factor, r.trained, o.beta_fast, o.beta_slow, o.truncate);
      return rescaled(s, g, r, f, attention, {
        rope_type: "yarn", factor: r.factor, original_max_position_embeddings: r.trained, beta_fast: o.beta_fast,
        beta_slow: o.beta_slow, truncate: o.truncate, attention_factor: attention, ...told,
      });
    },
    llama3: (s, g, o, r) => {
      if (o.high_freq_factor <= o.low_freq_factor) refuse("high_freq_factor must be greater than low_freq_factor.");
      const f = llama3Frequencies(s.inv_freq, r.factor, r.trained, o.low_freq_factor, o.high_freq_factor);
      return rescaled(s, g, r, f, 1, {
        rope_type: "llama3", factor: r.factor, original_max_position_embeddings: r.trained,
        low_freq_factor: o.low_freq_factor, high_freq_factor: o.high_freq_factor,
      });
    },
    longrope: (s, g, o, r) => {
      const long = yarnFrequencies(s.inv_freq, r.factor, r.trained, 32, 1, true);
      const scaling = s.scaling * (o.attention_factor === null ? longropeAttentionFactor(r.factor, r.trained) : o.attention_factor);
      if (long.every((x, i) => x === s.inv_freq[i])) {
        return { f: long, scaling, config: asLongrope(s, long, scaling, r.factor, r.trained) };
      }
      const weights = s.inv_freq.map((x, i) => (long[i] ? Math.log(x / long[i]) : 0));
      return { following: { f: s.inv_freq, weights, border: r.trained, step: null, factor: 1 }, scaling, config: null };
    },
    dynamic_ntk: (s, g, o) => ({
      following: {
        f: s.inv_freq, weights: ntkWeights(s.inv_freq.length), border: g.trained_length,
        step: o.step === null ? Math.max(1, Math.floor(g.trained_length / 16)) : o.step, factor: o.factor,
      }, scaling: s.scaling, config: null,
    }),
    proportional: (s, g, o) => ({
      f: proportionalFrequencies(g.rotary_dim, s.theta, o.partial_rotary_factor), scaling: 1,
      config: { rope_type: "proportional", rope_theta: s.theta, partial_rotary_factor: o.partial_rotary_factor, factor: 1 },
    }),
    clip: (s, g, o) => {
      const pairs = o.pairs === null ? unfinished(s.inv_freq, g.trained_length) : o.pairs;
      if (pairs > s.inv_freq.length) refuse(`This model has ${s.inv_freq.length} pairs: ${pairs} cannot be clipped.`);
      const f = clipped(s.inv_freq, pairs, o.taper);
      let config = null;
      if (s.plain && pairs === 0) config = { rope_type: "default", rope_theta: s.theta };
      else if (s.plain && g.rotary_dim === g.head_dim) {
        const dim = g.rotary_dim, left = 2 * (dim / 2 - pairs);
        for (const channels of [left, left + 1]) {
          const made = proportionalFrequencies(dim, s.theta, channels / dim);
          if (!config && made.every((x, i) => x === f[i])) {
            config = { rope_type: "proportional", rope_theta: s.theta, partial_rotary_factor: channels / dim };
          }
        }
      }
      return { f, scaling: s.scaling, config };
    },
  };

  /* ---- patterns.py: the distance at which query q takes key k to be; null where it does not see it ---- */
  function banded(causal, window, far) {
    const key = (p) => far.divisor === INF ? 0 : far.whole ? Math.floor(p / far.divisor) : p / far.divisor;
    const query = (p, side) => far.capped ? Math.min(p, far.offset) : key(p) + side * far.offset;
    return function (q, k) {
      const apart = q - k;
      if (causal && apart < 0) return null;
      if (Math.abs(apart) < window) return apart;
      if (!far || (far.first !== null && k >= far.first)) return null;
      return query(q, apart > 0 ? 1 : -1) - key(k);
    };
  }
  function chunked(chunk, reach) {
    return function (q, k) {
      if (q < k) return null;
      const back = Math.floor(q / chunk) - Math.floor(k / chunk), place = q % chunk, at = k % chunk;
      return (back === 0 ? place : back === 1 ? Math.min(place + chunk, reach - 1) : reach - 1) - at;
    };
  }
  function drawn(q, k, blocks, seed) {
    const wrap = (x) => BigInt.asIntN(64, x), two31 = 1n << 31n;
    for (let draw = 0; draw < blocks; draw++) {
      let mixed = wrap(BigInt(q + 1) * 2654435761n + BigInt(draw + 1) * 40503n + BigInt(seed + 1) * 69069n);
      mixed = wrap((mixed ^ (mixed >> 15n)) * 2246822519n);
      mixed = ((mixed % two31) + two31) % two31;
      if (Number(mixed % BigInt(q + 1)) === k) return true;
    }
    return false;
  }
  function scattered(causal, o, window) {
    return function (q, k) {
      const apart = q - k;
      if (causal && apart < 0) return null;
      const a = Math.floor(q / o.block), b = Math.floor(k / o.block);
      const seen = Math.abs(apart) < window
        || (o.global_tokens > 0 && (k < o.global_tokens || q < o.global_tokens))
        || (o.stride !== null && mod(apart, o.stride) === 0)
        || (o.random_blocks > 0 && (drawn(a, b, o.random_blocks, 0) || (!causal && drawn(b, a, o.random_blocks, 0))));
      return seen ? apart : null;
    };
  }
  const far = (given) => ({ divisor: 1, whole: false, offset: 0, capped: false, first: null, ...given });
  const up = (x) => Math.ceil(x - 1e-9);
  function firstAndRecent(g, first, window) {
    const most = g.trained_length - first, wide = window === null ? most : window;
    if (wide < 1 || wide > most) refuse("First tokens and window must fit into the trained length together.");
    return wide;
  }
  /* {told, most: the furthest distance that is told in a text of n tokens, reach} */
  const patterns = {
    self_extend: (g, o, r) => {
      const L = r.trained, window = o.window === null ? Math.max(Math.floor(L / 4), 1) : o.window;
      if (window >= L) refuse("window must be below the trained length; a quarter is usual.");
      const room = (2 * L) / 3 - window;
      if (o.group === null && room < 1) refuse("window leaves no room in the trained length: move group as well.");
      const group = o.group === null ? Math.max(up((r.target - window) / room), 1) : o.group;
      const longest = (L - window) * group + window;
      if (longest < r.target) refuse(`This window and group reach ${longest} tokens: a larger group does.`);
      const map = far({ divisor: group, whole: true, offset: window - Math.floor(window / group) });
      return { told: banded(g.causal, window, map), reach: longest, derived: { window, group } };
    },
    rerope: (g, o, r) => {
      const L = r.trained, window = o.window === null ? Math.max(Math.floor(L / 2), 1) : o.window;
      if (window >= L) refuse("window must be below the trained length; half is usual.");
      const divisor = o.slope === null ? INF : o.slope;
      if (window + (r.target - window) / divisor > L) refuse("This slope reaches past the trained length: a larger one does not.");
      return {
        told: banded(g.causal, window, far({ divisor, offset: window * (1 - 1 / divisor) })),
        reach: divisor === INF ? INF : Math.floor(window + (L - window) * divisor), derived: { window },
      };
    },
    dca: (g, o, r) => {
      const L = r.trained;
      const chunk = o.chunk !== null ? o.chunk : o.local_window !== null ? L - o.local_window : Math.max(Math.floor((3 * L) / 4), 1);
      const local = o.local_window !== null ? o.local_window : L - chunk;
      if (chunk < 1 || local < 1 || chunk + local > L) refuse("chunk and local_window together must fit into the trained length.");
      return { told: chunked(chunk, chunk + local), reach: INF, derived: { chunk, local_window: local } };
    },
    string: (g, o, r) => {
      const L = r.trained, shift = o.shift === null ? Math.max(Math.floor(L / 3), 2) : o.shift;
      const window = o.window === null ? Math.min(128, Math.max(Math.floor(shift / 2), 1)) : o.window;
      if (window >= shift) refuse("window must be below shift, or no distance becomes less.");
      const most = L + shift - window;
      if (r.target > most) refuse(`Distances stay within the trained length up to ${most} tokens: choose a smaller factor.`);
      return { told: banded(g.causal, shift, far({ offset: window - shift })), reach: most, derived: { shift, window } };
    },
    streaming: (g, o) => {
      const window = firstAndRecent(g, o.sinks, o.window);
      const map = far({ offset: o.sinks + window - 1, capped: true, first: o.sinks });
      return { told: banded(true, window, map), reach: INF, derived: { window } };
    },
    lm_infinite: (g, o) => {
      const window = firstAndRecent(g, o.global_tokens, o.window);
      return { told: banded(true, window, far({ divisor: INF, offset: window, first: o.global_tokens })), reach: INF, derived: { window } };
    },
    window: (g, o) => {
      const window = o.window === null ? g.trained_length : o.window;
      return { told: banded(g.causal, window, null), reach: window <= g.trained_length ? INF : g.trained_length, derived: { window } };
    },
    sparse: (g, o) => {
      const window = o.window === null ? Math.max(Math.floor(g.trained_length / 4), 1) : o.window;
      const near = !o.global_tokens && o.stride === null && !o.random_blocks;
      return { told: scattered(g.causal, o, window), reach: near ? INF : g.trained_length, derived: { window } };
    },
  };

  /* ---- biases: by head, of a key so many tokens before the query ---- */
  function slopes(n, most) {
    const power = 1 << Math.floor(Math.log2(n));
    const regular = range(power, (h) => Math.pow(2, (-most * (h + 1)) / power));
    const between = range(power, (h) => Math.pow(2, (-most * (2 * h + 1)) / (2 * power)));
    return regular.concat(between.slice(0, n - power));
  }
  function bucket(distance, buckets, most, bidirectional) {
    let offset = 0;
    if (bidirectional) { buckets = buckets >> 1; offset = distance > 0 ? buckets : 0; distance = Math.abs(distance); }
    else distance = -Math.min(distance, 0);
    const exact = buckets >> 1;
    if (distance < exact) return offset + distance;
    const octaves = f32(f32(Math.log(f32(Math.max(distance, 1) / exact))) / f32(Math.log(most / exact)));
    return offset + Math.min(exact + Math.trunc(f32(octaves * (buckets - exact))), buckets - 1);
  }
  const softplus = (x) => (x > 20 ? x : log1p(Math.exp(x)));
  const forgotten = (sign) => (s, g, o, d) => {
    const start = Math.log(Math.expm1(0.01 / g.trained_length)) * sign;
    return range(g.num_heads, () => -d * softplus(sign * (o.constant === null ? start : o.constant)));
  };
  const biases = {
    alibi: (s, g, o, d) => slopes(g.num_heads, o.alibi_bias_max).map((m) => -m * d),
    kerple: (s, g, o, d) => {
      const [r1, r2] = s.kernels[o.kernel].map((r) => r.map((x) => Math.max(x, 0.01)));
      return r1.map((a, h) => -a * (o.kernel === "log" ? log1p(r2[h] * d) : d === 0 ? 0 : Math.pow(d, Math.min(r2[h], 2))));
    },
    t5: (s, g, o, d) => {
      const most = o.relative_attention_max_distance;
      return s.weight.map((row) => row[bucket(-Math.min(d, most), 32, most, !g.causal)]);
    },
    fire: (s, g, o, d, position) => {
      const c = f32(0.1), [w, b] = s.inner;
      const part = log1p(c * d) / (log1p(c * Math.max(position, o.threshold)) + 1e-6);
      return s.outer.map((row) => row.reduce((sum, x, i) => sum + x * Math.max(w[i] * part + b[i], 0), 0));
    },
    sandwich: (s, g, o, d) => {
      const total = range(64, (k) => Math.cos(d * f32(Math.pow(10000, (-2 * k) / 128)))).reduce((a, x) => a + x, 0);
      return range(g.num_heads, (h) => total / f32((8 * (h + 1)) / g.num_heads));
    },
    fox: forgotten(-1),
    cable: forgotten(1),
  };

  /* ---- tables ---- */
  const angle = (p, f) => f32(p * f32(f));
  function sinusoid(p, frequencies, pairs, layout, channel) {
    const interleaved = layout === "interleaved";
    const pair = interleaved ? channel >> 1 : channel % pairs;
    const cos = interleaved ? channel % 2 === 1 : channel >= pairs;
    const a = angle(p, frequencies(pair));
    return cos ? Math.cos(a) : Math.sin(a);
  }
  const tables = {
    sinusoidal: (s, g, o, p, channel) => {
      const size = g.hidden_size;
      return sinusoid(p, (i) => Math.pow(o.base, (-2 * i) / size), size / 2, o.layout, channel);
    },
    fourier: (s, g, o, p, channel) => {
      if (o.frequencies === "log") return tables.sinusoidal(s, g, o, p, channel);
      return sinusoid(p, (i) => s.normal[i] * o.sigma, g.hidden_size / 2, o.layout, channel);
    },
  };
  /* learned.py: the row that each position reads, of a table whose rows hold their own numbers */
  const rows = {
    linear: (p, n, made) => (p * n) / made,
    cubic: (p, n, made) => (p * n) / made,
    grouped: (p, n, made) => Math.floor((p * n) / made),
    cyclic: (p, n) => p % n,
    hierarchical: (p, n, made, alpha) => (p < n ? p : (alpha * Math.floor(p / n)) / (1 - alpha) + (p % n)),
  };

  /* ---- temperatures.py, of a query that sees n tokens ---- */
  const temperatures = {
    "": null,
    log: (n, L) => Math.max(Math.log(Math.max(n, 2)) / Math.log(L), 1),
    drope: (n, L, factor) => 1 + 0.103 * Math.log(factor),
    llama4: (n) => 1 + 0.1 * log1p(Math.floor(Math.max(n, 0) / 8192)),
    ministral: (n, L, factor, original) => 1 + 0.1 * log1p(Math.floor(Math.max(n - 1, 0) / original)),
  };

  /* ---- what follows from frequencies ---- */
  const turns = (f, tokens) => f.map((x) => Math.min(1, (tokens * x) / TURN));
  const beyond = (seen, asked) => asked.filter((a, i) => a > seen[i] * 1.001).length;
  /* The longest text in which no pair leaves the angles that training has seen; pairs that made a whole turn have seen all. */
  function angleReach(before, at, trained, most) {
    const seen = turns(before, trained), holds = (n) => turns(at(n), n).every((a, i) => a <= seen[i] * (1 + 1e-9));
    if (holds(most)) return most;
    let low = 0, high = most;
    while (high - low > 1) { const mid = Math.floor((low + high) / 2); if (holds(mid)) low = mid; else high = mid; }
    return low;
  }
  const score = (f, d) => f.reduce((sum, x) => sum + Math.cos(d * x), 0) / f.length;

  return {
    Refused, TURN, range, rotary, patterns, biases, tables, rows, temperatures, following, defaultFrequencies, turns,
    beyond, angleReach, score,
  };
})();

"use strict";

const element = (id) => document.getElementById(id);

/** Decodes base64; the built-in function exists only since 2025. */
function decode(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let index = 0; index < bytes.length; index++) bytes[index] = characters.charCodeAt(index);
  return bytes;
}

/** Decompresses the text of an element. */
async function unpack(id) {
  const packed = new Blob([decode(element(id).textContent)]);
  element(id).remove();
  return new Response(packed.stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

/** Unpacks vectors (n, 3). */
function vectors(text) {
  const steps = new Int16Array(decode(text).buffer);
  return Array.from({length: steps.length / 3}, (_, row) => [0, 1, 2].map((axis) => steps[3 * row + axis] / 32767));
}

const scaled = (vector, length) => {
  const norm = Math.hypot(...vector);
  return vector.map((coordinate) => (norm > 0 ? (length * coordinate) / norm : 0));
};
const sum = (rows) => rows.reduce((total, row) => total.map((value, axis) => value + row[axis]), [0, 0, 0]);
const columns = (rows) => ({x: rows.map((row) => row[0]), y: rows.map((row) => row[1]), z: rows.map((row) => row[2])});
const gap = [null, null, null];
const dot = (a, b) => a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
const cross = (a, b) => [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]];
const minus = (a, b) => [a[0] - b[0], a[1] - b[1], a[2] - b[2]];

/** Shortens a name for the legend of a saved picture; zero-width spaces prevent plotly from parsing markup in it. */
const forLegend = (name) => (name.length > 30 ? `${name.slice(0, 29)}…` : name).replace(/[<&]/g, "$&\u200b");

const RANGE = 1.2;  // each axis runs from -RANGE to RANGE
const GLOBE = 0.97;  // radius of the ball that hides the far side; a larger one would cut markers at its edge
const OUTLINE = 1.02;  // radius of the circle around the ball, which has the markers at its edge inside
const TIP = 1.13;  // radius at which directions end
const MOST_NAMES = 40;  // names shown at a time; more would hide the points

const themeColor = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const isSeen = (plot, index) => plot.data[index].visible !== "legendonly";

// Traces and layout

/** Groups the points of the page by class. */
function grouped(content) {
  const points = vectors(content.points);
  const labels = new Int32Array(decode(content.labels).buffer);
  const directions = content.directions && vectors(content.directions);
  const classes = content.names.map((name, index) => ({
    name, color: content.colors[index], members: [], direction: directions ? directions[index] : null,
  }));
  points.forEach((_, index) => classes[labels[index]].members.push(index));
  for (const one of classes) {
    one.tip = one.direction && scaled(one.direction, TIP);
    // The name is at the points of the class, where its direction need not be.
    one.place = one.members.length > 0 ? scaled(sum(one.members.map((index) => points[index])), TIP) : one.tip;
  }
  return {...content, points, classes: classes.filter((one) => one.members.length > 0 || one.direction)};
}

function classTrace(one, points) {
  const rows = one.members.map((index) => points[index]);
  return {
    type: "scatter3d", mode: "markers", name: forLegend(one.name), hoverinfo: "none", showlegend: true,
    // A class without points still has a trace, and a legend entry for its direction.
    ...columns(rows.length > 0 ? rows : [gap]),
    marker: {size: points.length > 3000 ? 3.5 : 5, color: one.color, line: {width: 0}},
  };
}

const turn = Array.from({length: 97}, (_, step) => (2 * Math.PI * step) / 96);
const onSphere = (latitude, longitude) => [
  Math.cos(latitude) * Math.cos(longitude), Math.cos(latitude) * Math.sin(longitude), Math.sin(latitude),
];

function lineTrace(rows) {
  return {
    type: "scatter3d", mode: "lines", hoverinfo: "skip", showlegend: false, ...columns(rows),
    line: {width: 1, color: themeColor("wire")},
  };
}

/** Circles of latitude and longitude, 30 degrees apart. */
function wireTrace() {
  const rows = [];
  for (let degree = -60; degree <= 60; degree += 30) {
    rows.push(...turn.map((angle) => onSphere((degree * Math.PI) / 180, angle)), gap);
  }
  for (let degree = 0; degree < 180; degree += 30) {
    rows.push(...turn.map((angle) => onSphere(angle, (degree * Math.PI) / 180)), gap);
  }
  return lineTrace(rows);
}

/** A ball slightly smaller than the sphere, which hides the far side. */
function globeTrace() {
  const [rows, i, j, k] = [[], [], [], []];
  const [across, around] = [32, 64];
  for (let north = 0; north <= across; north++) {
    const latitude = (Math.PI * north) / across - Math.PI / 2;
    for (let east = 0; east <= around; east++) {
      const corner = rows.push(scaled(onSphere(latitude, (2 * Math.PI * east) / around), GLOBE)) - 1;
      if (north < across && east < around) {
        i.push(corner, corner + 1);
        j.push(corner + 1, corner + around + 2);
        k.push(corner + around + 1, corner + around + 1);
      }
    }
  }
  return {
    type: "mesh3d", hoverinfo: "skip", showlegend: false, ...columns(rows), i, j, k, color: themeColor("globe"),
    lighting: {ambient: 1, diffuse: 0, specular: 0, fresnel: 0},
  };
}

/** Lines along the class directions. */
function directionTrace(classes) {
  const rows = classes.filter((one) => one.direction).flatMap((one) => [[0, 0, 0], one.tip, gap]);
  const colors = classes.flatMap((one) => [one.color, one.color, one.color]);
  return {
    type: "scatter3d", mode: "lines", hoverinfo: "skip", showlegend: false, ...columns(rows.length > 0 ? rows : [gap]),
    line: {width: 5, color: colors},
  };
}

function layout(points) {
  const axis = {visible: false, showspikes: false, range: [-RANGE, RANGE]};
  const [x, y, z] = scaled(sum(points), 1);
  // The camera is above the mean of the points, slightly to the side.
  const [latitude, longitude] = [Math.asin(z) + 0.25, Math.atan2(y, x) + 0.25];
  // In a portrait window the sphere fits the width.
  const {clientWidth, clientHeight} = element("sphere");
  const eye = scaled(onSphere(Math.min(latitude, 1.5), longitude), 1.3 * Math.max(1, (1.05 * clientHeight) / clientWidth));
  return {
    margin: {l: 0, r: 0, t: 0, b: 0}, showlegend: false, hovermode: "closest", paper_bgcolor: "rgba(0, 0, 0, 0)",
    scene: {
      xaxis: axis, yaxis: axis, zaxis: axis, aspectmode: "cube", dragmode: "orbit",
      camera: {eye: {x: eye[0], y: eye[1], z: eye[2]}, center: {x: 0, y: 0, z: 0}, up: {x: 0, y: 0, z: 1}},
    },
    ...themed(),
  };
}

const themed = () => ({
  font: {family: getComputedStyle(document.body).fontFamily, size: 13, color: themeColor("ink")},
  modebar: {bgcolor: "rgba(0,0,0,0)", color: themeColor("faint"), activecolor: themeColor("ink")},
});

// Names of the classes

/** Position and axes of a plotly camera. */
function viewOf({eye, center, up}) {
  const axes = ({x, y, z}) => [x, y, z];
  const backward = scaled(minus(axes(eye), axes(center)), 1);
  const right = scaled(cross(axes(up), backward), 1);
  return {eye: axes(eye), backward, right, above: cross(backward, right)};
}

/** Projects a place as plotly does, to pixels: a cube of side 1, with a field of view of 45 degrees. */
function seenAt(place, {eye, backward, right, above}, {width, height}) {
  const offset = minus(place, eye);
  const focal = height / 2 / Math.tan(Math.PI / 8) / -dot(offset, backward);
  return [width / 2 + focal * dot(offset, right), height / 2 - focal * dot(offset, above)];
}

const inCube = (point) => point.map((coordinate) => coordinate / (2 * RANGE));

/** Returns whether the ball hides a place outside it from the camera. */
function isBehind(place, eye) {
  const way = minus(place, eye);
  const nearest = Math.min(Math.max(-dot(eye, way) / dot(way, way), 0), 1);
  return Math.hypot(...eye.map((coordinate, axis) => coordinate + nearest * way[axis])) < GLOBE / (2 * RANGE);
}

/** Returns the circle around the ball that the camera sees. */
function outline(eye) {
  const [radius, distance] = [OUTLINE / (2 * RANGE), Math.hypot(...eye)];
  if (distance <= radius) return [];  // the camera is inside
  const across = scaled(cross(eye, Math.abs(eye[2]) < 0.9 * distance ? [0, 0, 1] : [1, 0, 0]), 1);
  const [above, wide] = [scaled(cross(eye, across), 1), radius * Math.sqrt(1 - (radius / distance) ** 2)];
  return turn.map((angle) => eye.map((value, axis) => value * (radius / distance) ** 2
    + wide * (Math.cos(angle) * across[axis] + Math.sin(angle) * above[axis])));
}

/** Keeps the circle around the ball, and each class name at its class or near it, nearest first, without overlaps. */
function nameClasses(plot, content) {
  const tags = content.classes.map((one) => {
    const tag = element("names").appendChild(document.createElement("span"));
    tag.textContent = one.name;
    tag.style.borderLeft = `4px solid ${one.color}`;  // points of other classes may be beside it
    return {tag, place: inCube(one.place)};
  });
  const measure = () => {
    for (const {tag} of tags) tag.hidden = false;
    for (const one of tags) [one.width, one.height] = [one.tag.offsetWidth, one.tag.offsetHeight];
  };
  const arrange = (camera) => {
    const view = viewOf(camera);
    const frame = plot.getBoundingClientRect();
    const solid = element("solid").getAttribute("aria-pressed") === "true";
    const distance = ({place}) => Math.hypot(...minus(place, view.eye));
    const circle = outline(view.eye).map((place) => seenAt(place, view, frame).join(" "));
    document.querySelector("#outline path").setAttribute("d", circle.length > 0 ? `M${circle.join("L")}Z` : "");
    const taken = [];
    const order = tags.map((_, index) => index).sort((a, b) => distance(tags[a]) - distance(tags[b]));
    for (const index of order) {
      const {tag, width, height, place} = tags[index];
      const inside = (value, size, full) => Math.min(Math.max(value, size / 2), full - size / 2);
      const seen = seenAt(place, view, frame);
      const left = inside(seen[0], width, frame.width);
      const isFree = (top) => !taken.some((other) => 2 * Math.abs(left - other.left) < width + other.width
        && 2 * Math.abs(top - other.top) < height + other.height);
      // Names of classes around the same place stand above and below each other.
      const top = [0, 1, -1, 2, -2].map((step) => inside(seen[1] + step * height, height, frame.height)).find(isFree);
      const isBeside = dot(minus(place, view.eye), view.backward) >= 0;  // the camera may be inside the sphere
      tag.hidden = !isSeen(plot, index) || isBeside || (solid && isBehind(place, view.eye))
        || taken.length === MOST_NAMES || top === undefined;
      if (tag.hidden) continue;
      tag.style.transform = `translate(${left - width / 2}px, ${top - height / 2}px)`;
      taken.push({left, top, width, height});
    }
  };
  const now = () => arrange(plot.layout.scene.camera);
  plot.on("plotly_relayouting", (change) => change["scene.camera"] && arrange(change["scene.camera"]));
  plot.on("plotly_relayout", now);
  plot.on("plotly_restyle", now);
  // plotly emits no event for touch rotation, and its layout keeps the old camera.
  const live = () => plot._fullLayout.scene._scene.getCamera();
  plot.addEventListener("touchmove", () => requestAnimationFrame(() => arrange(live())), {capture: true, passive: true});
  for (const kind of ["touchend", "touchcancel"]) {
    plot.addEventListener(kind, () => {
      const camera = live();
      const {eye} = plot.layout.scene.camera;
      if (Math.hypot(camera.eye.x - eye.x, camera.eye.y - eye.y, camera.eye.z - eye.z) < 1e-6) return;
      Plotly.relayout(plot, {"scene.camera": camera});
    }, {capture: true, passive: true});
  }
  new ResizeObserver(() => { measure(); now(); }).observe(plot);
}

// Details of the point under the mouse

/** Draws the thumbnail of a point on a canvas; sheets are decoded on first use. */
function thumbnailPainter(thumbnails, canvas) {
  const {width, height, columns: across, per_sheet: perSheet, sheets} = thumbnails;
  const decoded = [];
  const enlarged = Math.max(128 / Math.max(width, height), 1);
  [canvas.width, canvas.height] = [width, height];
  canvas.style.width = `${Math.round(width * enlarged)}px`;
  canvas.style.height = `${Math.round(height * enlarged)}px`;
  let wanted = null;
  return async (point) => {
    wanted = point;
    canvas.getContext("2d").clearRect(0, 0, width, height);
    const [number, place] = [Math.floor(point / perSheet), point % perSheet];
    decoded[number] ??= createImageBitmap(new Blob([decode(sheets[number])], {type: "image/webp"}));
    const sheet = await decoded[number];
    if (wanted !== point) return;
    const [left, top] = [(place % across) * width, Math.floor(place / across) * height];
    canvas.getContext("2d").drawImage(sheet, left, top, width, height, 0, 0, width, height);
    canvas.dataset.point = point;
  };
}

function showCards(plot, content) {
  const [card, canvas] = [element("card"), element("thumbnail")];
  canvas.hidden = !content.thumbnails;
  const paint = content.thumbnails ? thumbnailPainter(content.thumbnails, canvas) : () => {};
  // plotly does not report the position of the mouse.
  let mouse = {clientX: 0, clientY: 0};
  for (const kind of ["pointermove", "pointerdown"]) {
    plot.addEventListener(kind, (event) => { mouse = event; }, {capture: true});
  }
  const show = ({points: [hit]}) => {
    const one = content.classes[hit.curveNumber];
    const point = one.members[hit.pointNumber];
    paint(point);
    element("class").textContent = one.name;
    element("swatch").style.background = one.color;
    element("text").textContent = content.texts ? content.texts[point] : "";
    element("number").textContent = `point ${point}`;
    card.hidden = false;
    // Beside the mouse, on the side with room; if there is none, above or below it.
    const {width, height} = card.getBoundingClientRect();
    const sides = [mouse.clientX + 18, mouse.clientX - 18 - width].filter((left) => left >= 8 && left + width <= innerWidth - 8);
    const ends = mouse.clientY > innerHeight / 2 ? mouse.clientY - 18 - height : mouse.clientY + 18;
    const top = sides.length > 0 ? mouse.clientY - height / 2 : ends;
    card.style.left = `${sides[0] ?? Math.max(8, (innerWidth - width) / 2)}px`;
    card.style.top = `${Math.max(8, Math.min(top, innerHeight - height - 8))}px`;
  };
  const hide = () => { card.hidden = true; };
  plot.on("plotly_hover", show);
  plot.on("plotly_click", show);
  plot.on("plotly_unhover", hide);
  plot.addEventListener("touchmove", hide, {capture: true, passive: true});
  plot.on("plotly_relayouting", hide);
  plot.addEventListener("mouseleave", hide);
}

// Buttons

/** Lists the classes as buttons that hide and show them. */
function listClasses(plot, content) {
  const all = content.classes.map((_, index) => index);
  const show = (isShown) => Plotly.restyle(plot, {visible: all.map((index) => isShown(index) || "legendonly")}, all);
  const toggle = (index) => show((other) => isSeen(plot, other) !== (other === index));
  const isolate = (index) => {
    const isAlone = all.every((other) => isSeen(plot, other) === (other === index));
    show((other) => isAlone || other === index);
  };
  content.classes.forEach((one, index) => {
    const button = element("legend").appendChild(document.createElement("button"));
    Object.assign(button, {type: "button", textContent: one.name, ondblclick: () => isolate(index)});
    button.onclick = ({shiftKey}) => (shiftKey ? isolate : toggle)(index);
    button.style.setProperty("--color", one.color);
    button.setAttribute("aria-pressed", true);
  });
  element("all").onclick = () => show(() => true);
  element("none").onclick = () => show(() => false);
}

/** Keeps the buttons and the directions of the classes as these are shown or hidden. */
function followClasses(plot, content) {
  const lines = content.classes.length + 2;
  plot.on("plotly_restyle", ([change]) => {
    if (!("visible" in change)) return;
    [...element("legend").children].forEach((button, index) => button.setAttribute("aria-pressed", isSeen(plot, index)));
    if (!content.directions) return;
    const {x, y, z, line} = directionTrace(content.classes.filter((_, index) => isSeen(plot, index)));
    Plotly.restyle(plot, {x: [x], y: [y], z: [z], "line.color": [line.color]}, [lines]);
  });
}

/** Draws a von Mises-Fisher sample around the mean direction of the visible points; `draws` are uniform. */
function sampleAround(plot, content) {
  const slider = element("kappa"), trace = content.classes.length + 3;
  const draws = Array.from({length: 500}, () => [Math.random(), 2 * Math.PI * Math.random()]);
  const update = () => {
    const isOff = slider.value === slider.min, kappa = Number((10 ** slider.value).toPrecision(2));
    const seen = content.classes.filter((_, index) => isSeen(plot, index));
    const total = sum(seen.flatMap((one) => one.members.map((index) => content.points[index])));
    const mean = Math.hypot(...total) > 0 ? scaled(total, 1) : [0, 0, 1];
    const right = scaled(cross(mean, Math.abs(mean[2]) < 0.9 ? [0, 0, 1] : [1, 0, 0]), 1), above = cross(mean, right);
    const rows = (isOff ? [] : draws).map(([uniform, angle]) => {
      const cosine = 1 + Math.log(uniform + (1 - uniform) * Math.exp(-2 * kappa)) / kappa;  // the quantile function
      const sine = Math.sqrt(Math.max(0, 1 - cosine ** 2));
      return mean.map((value, axis) =>
        cosine * value + sine * (Math.cos(angle) * right[axis] + Math.sin(angle) * above[axis]));
    });
    element("chosen").textContent = isOff ? "off" : `κ ${kappa}, R ${(1 / Math.tanh(kappa) - 1 / kappa).toFixed(2)}`;
    const {x, y, z} = columns(rows);
    Plotly.restyle(plot, {x: [x], y: [y], z: [z]}, [trace]);
  };
  slider.oninput = update;
  plot.on("plotly_restyle", ([change]) => { if ("visible" in change && slider.value !== slider.min) update(); });
}

/** Saves the sphere as it is seen, with a legend. */
function savePicture(plot) {
  const circle = outline(viewOf(plot.layout.scene.camera).eye).map((place) => place.map((value) => 2 * RANGE * value));
  const layout = {...plot.layout, showlegend: true, paper_bgcolor: themeColor("page")};
  const size = {width: plot.clientWidth, height: plot.clientHeight, scale: 2};
  Plotly.downloadImage({data: [...plot.data, lineTrace(circle)], layout}, {format: "png", filename: "sphere", ...size});
}

function switchTheme(plot, content) {
  const [globe, wires] = [content.classes.length, content.classes.length + 1];
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = async (dark) => {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    element("theme").textContent = dark ? "Light" : "Dark";
    if (!plot.data) return;
    await Plotly.update(plot, {color: themeColor("globe")}, themed(), [globe]);
    await Plotly.restyle(plot, {"line.color": themeColor("wire")}, [wires]);
    await Plotly.restyle(plot, {"marker.color": themeColor("faint")}, [wires + 2]);
  };
  const isDark = () => document.documentElement.dataset.theme === "dark";
  system.addEventListener("change", () => apply(system.matches));
  element("theme").onclick = () => apply(!isDark());
  apply(system.matches);
}

function switchGlobe(plot, content) {
  element("solid").onclick = ({target}) => {
    const solid = target.getAttribute("aria-pressed") !== "true";
    target.setAttribute("aria-pressed", solid);
    Plotly.restyle(plot, {visible: solid}, [content.classes.length]);
  };
}

async function main() {
  const plot = element("sphere");
  const content = grouped(JSON.parse(await unpack("content")));
  const count = (number, one, many) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
  element("about").textContent =
    `${count(content.points.length, "point", "points")}, ${count(content.names.length, "class", "classes")}`;
  element("note").textContent = content.note;
  switchTheme(plot, content);
  const library = document.createElement("script");
  library.textContent = await unpack("plotly");
  document.head.append(library);
  const traces = [
    ...content.classes.map((one) => classTrace(one, content.points)),
    globeTrace(), wireTrace(), directionTrace(content.classes),
    {...lineTrace([]), mode: "markers", marker: {size: 3, color: themeColor("faint")}},
  ];
  listClasses(plot, content);  // before the layout, since the legend takes room from the sphere
  const start = layout(content.points);
  const camera = structuredClone(start.scene.camera);
  const home = {
    name: "home", title: "Reset the view", icon: Plotly.Icons.home,
    click: () => Plotly.relayout(plot, {"scene.camera": structuredClone(camera)}),
  };
  const save = {name: "save", title: "Save as an image", icon: Plotly.Icons.camera, click: savePicture};
  await Plotly.newPlot(plot, traces, start, {
    responsive: true, displaylogo: false, plotGlPixelRatio: devicePixelRatio, modeBarButtons: [[home, save]],
    typesetMath: false,  // class names may contain dollar signs
  });
  nameClasses(plot, content);
  showCards(plot, content);
  followClasses(plot, content);
  switchGlobe(plot, content);
  sampleAround(plot, content);
  element("message").hidden = true;
  // The sphere is visible once the browser has drawn a frame with it.
  requestAnimationFrame(() => requestAnimationFrame(() => { document.documentElement.dataset.drawn = "true"; }));
}

main().catch((error) => {
  element("message").hidden = false;
  element("message").textContent = `The sphere could not be drawn: ${error.message}`;
  throw error;
});

// Elements of the page by their names.

export function byId(id) {
  return document.getElementById(id);
}

export function byIds(...ids) {
  return ids.map(byId);
}

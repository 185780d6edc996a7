// A view that shows itself again now and then, but not under the hands of somebody who works with it.

/** Show the view again after so many seconds, or later, when nobody looks away from it or holds something of it. */
export function renew(refresh, seconds) {
  const address = location.hash;
  setTimeout(() => {
    if (location.hash !== address) return;
    if (idle()) refresh();
    else renew(refresh, seconds);
  }, seconds * 1000);
}

function idle() {
  const main = document.getElementById("main");
  const held = ![main, document.body].includes(document.activeElement) || !getSelection().isCollapsed;
  return !document.hidden && !held && !main.querySelector("details[open]");
}

() => {
  const query = () => document.querySelector("#query input, #query textarea");
  const tab = (name) => document.querySelector(`#tabs [role=tab][data-tab-id=${name}]`);
  const typing = (element) => element && element.matches("input:not([type=radio]), textarea, [contenteditable]");

  // "/" focuses the search box from any tab, except while typing in a field.
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || typing(document.activeElement)) return;
    event.preventDefault();
    tab("pictures").click();
    requestAnimationFrame(() => { query().focus(); query().select(); });
  });

  // The arrow keys move between tabs.
  document.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const tabs = [...document.querySelectorAll("#tabs [role=tab]")], at = tabs.indexOf(document.activeElement);
    if (!step || at < 0) return;
    const next = tabs[(at + step + tabs.length) % tabs.length];
    next.click();
    next.focus();
  });

  // A pasted image goes into the image field of the open tab.
  document.addEventListener("paste", (event) => {
    const image = [...event.clipboardData.files].find((file) => file.type.startsWith("image/"));
    if (!image) return;
    event.preventDefault();
    if (tab("pictures").ariaSelected === "true") tab("captions").click();
    const put = (frames) => {  // a tab opened for the first time gets its field some frames later
      const name = tab("classify").ariaSelected === "true" ? "classify-picture" : "caption-picture";
      const field = document.querySelector(`#${name} input[type=file]`), files = new DataTransfer();
      if (!field) return frames && requestAnimationFrame(() => put(frames - 1));
      files.items.add(image);
      field.files = files.files;
      field.dispatchEvent(new Event("change", { bubbles: true }));
    };
    requestAnimationFrame(() => put(300));
  });

  // On a phone, focus would open the keyboard over the page.
  if (matchMedia("(pointer: fine)").matches) query()?.focus();
}

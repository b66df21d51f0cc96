// The site's search runs in a Worker, which a browser does not start for a page that was opened from the disk.
// There, this takes the Worker's place: the same script in a frame that is not shown, with the two ways of messages.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const source = String(script).replace(/"/g, "%22");
      this.ready = new Promise((done) => { this.inside.began = done; });
      this.inside.document.write(
        "<script>var postMessage = answer</script>" +
        `<script src="${source}"></script>` +
        "<script>began()</script>");
      this.inside.document.close();
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
}

/** Follows growing text, but only while the reader is at its end. */

import { oncePerFrame } from "./dom.js";

const NEAR = 48; // pixels that still count as the end

export class Follower {
  constructor(scroller) {
    this.scroller = scroller;
    this.isAtEnd = true;
    this.follow = oncePerFrame(() => {
      if (this.isAtEnd) this.scroller.scrollTop = this.scroller.scrollHeight;
    });
    scroller.addEventListener(
      "scroll",
      () => (this.isAtEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR),
      { passive: true },
    );
  }

  jump() {
    this.isAtEnd = true;
    this.follow();
  }
}

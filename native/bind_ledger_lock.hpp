// The ledger's lock, as bindings take it.
#pragma once

#include <mutex>

#include "ledger/core.hpp"

namespace kvpool {

// Held while the core is read or changed, never while Python objects are made: that may run other Python code.
using Lock = std::lock_guard<std::mutex>;

template <class Look>
auto read(ledger::Core& core, Look&& look) {
  const Lock lock(core.mutex());
  return look();
}

// A method that takes the ledger's lock and passes its arguments on.
template <class R, class... A>
auto locked(R (ledger::Core::*method)(A...)) {
  return [method](ledger::Core& self, A... arguments) -> R {
    const Lock lock(self.mutex());
    return (self.*method)(arguments...);
  };
}

// The same for what may release blocks: they are stamped with the caller's clock.
template <class... A>
auto timed(void (ledger::Core::*method)(A...)) {
  return [method](ledger::Core& self, A... arguments, double now) {
    const Lock lock(self.mutex());
    self.blocks().now = now;
    (self.*method)(arguments...);
  };
}

}  // namespace kvpool

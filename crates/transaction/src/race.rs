//! Race points: places between two steps that other threads must not be able to disturb. Tests of debug builds delay
//! threads at these places, so that orders of threads that are rare on an idle machine become frequent. A test calls
//! `delay_races`; the environment variable `UBTRFS_DELAY_RACES` (microseconds) does the same for any program.
//!
//! In release builds, [`race_point`] does nothing.

/// Delays the calling thread now and then, if a test asked for that.
#[inline]
pub fn race_point() {
    #[cfg(debug_assertions)]
    delays::at_race_point();
}

#[cfg(debug_assertions)]
pub use delays::delay_races;

#[cfg(debug_assertions)]
mod delays {
    use std::cell::Cell;
    use std::hash::{BuildHasher, RandomState};
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    static MAX_MICROS: LazyLock<AtomicU64> = LazyLock::new(|| {
        let wanted = std::env::var("UBTRFS_DELAY_RACES").ok().and_then(|text| text.parse().ok());
        AtomicU64::new(wanted.unwrap_or_default())
    });

    thread_local! {
        static NR_PASSED: Cell<u64> = const { Cell::new(0) };
        static KEYS: RandomState = RandomState::new();
    }

    /// From now on, delays threads of this process by up to `longest` at some of the race points that they pass.
    pub fn delay_races(longest: Duration) {
        MAX_MICROS.store(u64::try_from(longest.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub(super) fn at_race_point() {
        let most = MAX_MICROS.load(Ordering::Relaxed);
        if most == 0 {
            return;
        }
        let number = NR_PASSED.get().wrapping_add(1);
        NR_PASSED.set(number);
        let random = KEYS.with(|keys| keys.hash_one(number));
        // Short delays are frequent, and long ones are rare.
        if random.is_multiple_of(DELAYED_ONE_IN) {
            let longest = most >> ((random >> 8) % 8);
            let micros = (random >> 16).checked_rem(longest).unwrap_or(0);
            std::thread::sleep(Duration::from_micros(micros));
        }
    }

    const DELAYED_ONE_IN: u64 = 4;
}

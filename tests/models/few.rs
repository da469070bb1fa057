//! A short list without an allocation: states are copied and hashed by the million.

use std::ops::Deref;

/// At most `N` items, in order. What is not used is the default, so that equal lists hash alike.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Few<T, const N: usize> {
    items: [T; N],
    len: u8,
}

impl<T: Copy + Default, const N: usize> Default for Few<T, N> {
    fn default() -> Self {
        Self { items: [T::default(); N], len: 0 }
    }
}

impl<T: Copy + Default, const N: usize> Few<T, N> {
    /// A model that needs more room than it has would be checked wrongly, so this panics.
    pub fn push(&mut self, item: T) {
        self.items[usize::from(self.len)] = item;
        self.len += 1;
    }

    pub fn remove(&mut self, at: usize) -> T {
        let item = self[at];
        let len = usize::from(self.len);
        self.items.copy_within(at + 1..len, at);
        self.len -= 1;
        self.items[usize::from(self.len)] = T::default();
        item
    }

    pub fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        let mut kept = Self::default();
        self.iter().filter(|item| keep(item)).for_each(|item| kept.push(*item));
        *self = kept;
    }

    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, T> {
        self.items[..usize::from(self.len)].iter_mut()
    }
}

impl<T, const N: usize> Deref for Few<T, N> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.items[..usize::from(self.len)]
    }
}

impl<T: std::fmt::Debug, const N: usize> std::fmt::Debug for Few<T, N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&self[..]).finish()
    }
}

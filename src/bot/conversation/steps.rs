//! The steps of a flow as an enum, so that a missing step does not compile.

/// The steps of a flow, in order. Made by [`steps!`](crate::steps).
pub trait Steps: Copy + Send + Sync + 'static {
    /// All of them, in order.
    fn all() -> &'static [Self];

    /// The name a checkpoint keeps.
    fn name(self) -> &'static str;

    /// Where in [`Steps::all`].
    fn index(self) -> usize;

    /// The step after this one.
    fn following(self) -> Option<Self> {
        Self::all().get(self.index() + 1).copied()
    }

    /// The step of that name.
    fn named(name: &str) -> Option<Self> {
        Self::all().iter().copied().find(|step| step.name() == name)
    }
}

/// Declares the steps of a flow.
///
/// ```
/// use botmesh::{bot::Steps, steps};
/// steps! { enum At { Item, Quantity, Address = "where" } }
/// assert_eq!(At::Address.name(), "where");
/// assert!(At::Item.following() == Some(At::Quantity));
/// ```
///
/// A step's name is what checkpoints keep; a variant may be renamed under an old name with `= ".."`.
#[macro_export]
macro_rules! steps {
    ($(#[$meta:meta])* $vis:vis enum $name:ident {
        $($(#[$step_meta:meta])* $step:ident $(= $text:literal)?),+ $(,)?
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $vis enum $name { $($(#[$step_meta])* $step),+ }

        impl $crate::bot::Steps for $name {
            fn all() -> &'static [Self] {
                &[$(Self::$step),+]
            }

            fn name(self) -> &'static str {
                match self { $(Self::$step => $crate::steps!(@name $step $($text)?)),+ }
            }

            fn index(self) -> usize {
                self as usize
            }
        }
    };
    (@name $step:ident $text:literal) => { $text };
    (@name $step:ident) => { stringify!($step) };
}

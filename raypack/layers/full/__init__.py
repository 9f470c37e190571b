"""F, full attention at the sample's parent: by heads, by gathered keys, or spread over nodes."""
